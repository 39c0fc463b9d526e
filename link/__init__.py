"""What both sides use at the rim: the MQTT connection and the typed configuration loader."""
