"""gemsc compiles PyTorch models into one readable training program per MPI rank."""
