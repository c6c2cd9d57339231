"""Records of attempts: model calls with their deliveries, telemetry, and objects that agents store."""
