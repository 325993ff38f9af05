"""Says where the time of a torch.distributed run goes, and why.

Only `dflash_profiling.record` needs torch: it writes the traces. Nothing here needs the trainer.
"""
