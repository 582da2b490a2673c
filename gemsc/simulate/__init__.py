"""Training on machines that are not there: `gemsc simulate`."""
