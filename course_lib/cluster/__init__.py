"""Machines, networks and GPUs: is this one fit for the course? See `course doctor`."""
