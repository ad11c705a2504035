"""One Triton source for every vendor; modules here import triton and nothing else."""
