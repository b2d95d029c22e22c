"""draft"""

def draw(report, path):
    pass
