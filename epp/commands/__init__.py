"""The commands of `kvsteer`: one a file, each exporting `command`, imported only when it is used."""
