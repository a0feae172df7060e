"""What stands between convolutions: epilogues, masks, pools, resampling, turning."""
