"""What stands between convolutions: epilogues, masks, pooling, turning."""
