"""DFlash: config, data, target, drafter, training step, decoding. Knows nothing of the ring.

Importing the package imports no torch.
"""
