"""The loss: papers and equations as functions of log-probabilities, advantages and values."""
