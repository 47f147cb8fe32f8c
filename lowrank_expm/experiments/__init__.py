"""The claims about Orthogonal Self-Attention, each tried by a command.

Run ``python -m lowrank_expm.experiments --help``. Needs PyTorch, scikit-learn and matplotlib.
"""
