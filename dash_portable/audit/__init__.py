"""Compile every kernel for GPUs that are not here, and hold what each needs against what the card has."""
