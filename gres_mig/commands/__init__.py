"""The commands of `gres-mig`, a module each, loaded only when named."""
