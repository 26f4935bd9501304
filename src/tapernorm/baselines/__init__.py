"""What people would otherwise pick: other ways to have a transformer without normalization, to compare with."""
