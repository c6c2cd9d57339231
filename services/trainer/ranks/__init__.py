"""The processes of one trainer, and what they say to each other."""
