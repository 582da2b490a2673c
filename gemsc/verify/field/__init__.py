"""The ranks' own files over a finite field: a proof for all inputs."""
