"""`python -m shoal.surfaces` prints docs/coming-from.md."""

from shoal.surfaces.page import page

if __name__ == "__main__":
    print(page(), end="")
