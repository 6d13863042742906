"""The files of container images, in which programs run behind the walls of all."""
