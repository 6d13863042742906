"""Math with answers in `\\boxed{}`: finding the answer, grading it, rewards, and the data."""
