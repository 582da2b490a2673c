"""What a dataset of a user may be: samples by their number, or a stream of them."""
