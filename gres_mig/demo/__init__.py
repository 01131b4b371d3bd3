"""The main job, done for real and told as stories that check themselves: on one node, and through Slurm."""
