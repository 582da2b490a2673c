"""What every part uses: boxes, nests, units, files, random numbers, threads."""
