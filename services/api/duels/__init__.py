"""Duels: win rates of evaluations by judges that compare answers in pairs."""
