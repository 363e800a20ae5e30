"""Collectives by hand: each algorithm is one readable file over one small interface, `Transport`."""
