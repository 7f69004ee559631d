"""Instructions that a program can verify: the 25 kinds of IFEval (Zhou et al., arXiv:2311.07911)."""
