"""`python -m dflash_dist` is `dflash-dist`; the launcher starts each rank this way."""

from dflash_dist.cli import main

main()
