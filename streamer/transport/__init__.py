"""How bytes travel: NCCL, Gloo."""
