"""How messages travel between ranks: MPI, devices."""
