"""What rounding costs: errors of attention by the formats that it is computed in, without a GPU."""
