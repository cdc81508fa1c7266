"""A simulated schedule, executed on a GPU: predicted against measured, step by step.

``log`` reads what ``kvsim run --record schedule`` wrote, ``run`` picks steps,
``predict`` prices them, ``executor`` runs them on a stack of random weights (``stack``)
over a real paged pool (``pool``), and ``compare`` says how far apart both are.
``truth`` proves that a log is executed as it is meant: all logits against dense
attention. Only `executor`, `graphs`, `pool`, `setup`, `stack` and `truth` import torch.
"""
