"""Pipeline-parallel training of DFlash drafters on torch.distributed."""

__version__ = "0.1.0"
