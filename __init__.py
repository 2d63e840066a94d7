"""Export PyTorch models to planned device programs, and run them without torch.

This folder is the package ``devplan``: ``planner/text.py`` is ``devplan.planner.text``.
"""
