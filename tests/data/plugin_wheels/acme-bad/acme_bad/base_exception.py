class Panic(BaseException):
    pass


raise Panic("out of luck")
