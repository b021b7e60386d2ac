from pydantic import BaseModel


class Loose:
    class Settings(BaseModel):
        pass
