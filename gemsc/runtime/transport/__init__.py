"""How messages travel between ranks: MPI, threads for tests, devices."""
