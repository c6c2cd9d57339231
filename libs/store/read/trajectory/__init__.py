"""An attempt as conversations, for graders, and as transitions, for people and programs."""
