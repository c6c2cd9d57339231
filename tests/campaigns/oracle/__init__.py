"""Compares losses, corrections and estimators with installed verl and TRL on random shapes: `make oracle`."""
