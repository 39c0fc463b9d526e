"""The verifier: many sessions' drafts through one target model."""
