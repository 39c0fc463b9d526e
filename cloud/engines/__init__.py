"""Engines: what runs the target model, behind one interface (`cloud.engines.base`)."""
