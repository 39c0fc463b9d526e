"""Texts that a target writes behind many prompts: what calibration learns from and fidelity is measured on."""
