"""What ranks send, as plain data: the compiler writes it, ranks read it."""
