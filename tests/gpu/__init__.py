"""Proofs that need a GPU. In Triton's interpreter they run small, as a rehearsal."""
