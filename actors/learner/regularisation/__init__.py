"""What holds a policy back: the reference of its KL, and its entropy."""
