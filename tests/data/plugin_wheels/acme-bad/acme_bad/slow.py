import time

NONET_API = "1.1"

time.sleep(600)
