#!/bin/sh
# Starts the CPU stand-in of SGLang; ENGINE_ variables are its settings.
exec python -m leyden.services.engine
