"""The ten promises of the architecture, one file each, kept by real processes that are broken from outside."""
