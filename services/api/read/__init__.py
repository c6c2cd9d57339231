"""Routes that read across rollouts and runs, for people who look for a cause."""
