"""GPU memory on demand for Slurm and Jupyter, through NVIDIA MIG."""

__version__ = "0.1.0"
