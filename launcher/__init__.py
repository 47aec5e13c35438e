"""Between the command line and the two halves: preflight, supervision, run records, screens.

Imports no torch.
"""
