"""Games of other packages, played as games of ours."""
