//! Passwords, which no message shows: neither ours nor a driver's.

use url::Url;

/// The passwords of the URLs in use, as they are written and as they are meant.
#[derive(Debug, Default)]
pub(crate) struct Secrets(Vec<String>);

impl Secrets {
    /// Remembers the password of this URL.
    pub(crate) fn add(&mut self, url: &str) {
        if let Some(written) = Url::parse(url).ok().and_then(|it| it.password().map(str::to_owned)) {
            let meant = percent_decoded(&written);
            self.0.extend([written, meant].into_iter().filter(|it| !it.is_empty()));
        } else if let Some((user, _)) = url.split_once("://").and_then(|(_, rest)| rest.rsplit_once('@')) {
            // A URL that is none, because of its password, perhaps.
            self.0.extend(user.split_once(':').map(|(_, password)| password.to_owned()));
        }
    }

    /// The text with `***` in the place of each password.
    pub(crate) fn hidden_in(&self, text: &str) -> String {
        self.0.iter().fold(text.to_owned(), |text, password| text.replace(password, "***"))
    }
}

fn percent_decoded(text: &str) -> String {
    let query = format!("p={}", text.replace('+', "%2B"));
    url::form_urlencoded::parse(query.as_bytes()).next().map(|it| it.1.into_owned()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_is_hidden_as_it_is_written_and_as_it_is_meant() {
        let mut secrets = Secrets::default();
        secrets.add("postgres://app:s%40cret@db/shop");
        assert_eq!(secrets.hidden_in("no `s@cret` at postgres://app:s%40cret@db"), "no `***` at postgres://app:***@db");
        let mut secrets = Secrets::default();
        secrets.add("postgres://app:half#open@db:port/shop");
        assert_eq!(secrets.hidden_in("postgres://app:half#open@db"), "postgres://app:***@db");
        assert_eq!(Secrets::default().hidden_in("nothing"), "nothing");
    }
}
