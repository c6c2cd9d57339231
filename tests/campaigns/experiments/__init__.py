"""`make experiment NAME=sql SEEDS=3 STEPS=10`: trainings that compare held-out tasks before and after, over seeds.

Every figure is read from the store. A command that is repeated finds its runs again, finishes those that are not over,
and writes its page.
"""
