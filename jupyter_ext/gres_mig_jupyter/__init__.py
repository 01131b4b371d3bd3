"""Jupyter's side of gres-mig: one MIG instance for each kernel that asks for GPU memory."""
