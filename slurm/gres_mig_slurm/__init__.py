"""Slurm's side of gres-mig: what its hooks run, and what its controller is asked."""
